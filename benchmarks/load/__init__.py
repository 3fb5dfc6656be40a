"""The load test of a split model that the fleet serves: Locust's mixed traffic, everything loaded and by parts."""
