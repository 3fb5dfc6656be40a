"""What engines that compute in the worker's own process share: interfaces, one compute thread, the HTTP side.

An engine loads a `LocalModel` and hands it to a `LocalServer`; reading requests, decoding sound and images, and
writing answers in OpenAI's shapes is done here, the same for every engine.
"""
