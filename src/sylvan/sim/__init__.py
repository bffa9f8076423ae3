"""Runs the real scheduler, cache and routing policies on a virtual clock (`sylvan simulate`).

Start at `scenarios.Study`, which runs each setup as a `fleet.Fleet`: `replica` is the real
scheduler and cache with an executor that only takes time (`executor`), `routing` the gateway's
real policies. `fit` makes the profile of step times (`profile`, `cost`) from a flight recording
(`observed`).
"""
