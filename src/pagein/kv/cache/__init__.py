"""KV caches for transformers over blocks: a device's arena, and what is below it. Needs torch and transformers.

`tiered.TieredCache` is what `generate` takes; its `layers` share one `batch` of `row`s, whose blocks a `device` hands
out of its `arena`s. `pool.KvPool` keeps many conversations over several tiers.
"""
