"""KV stores that outlive the process, by URL, and their record format.

`api.PageStore` is the interface, `backends` has one module per URL scheme, `find.open_store` opens
one. `record` is the format of a page, `manifest` says which servers may share pages, `maintenance`
implements `sylvan cache`. Which pages are written and read: `sylvan.runtime.features.tiers`.
"""
