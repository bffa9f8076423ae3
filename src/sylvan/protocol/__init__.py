"""Types that cross a process: requests, messages, sampling parameters, errors.

Plain structs with little behaviour; every other package may import them. `requests` and `sampling`
define a request, `messages` what the processes of a server exchange, `commands` what an executor
does between two steps, `errors` the exceptions, `journal` the protocol with gateways. How messages
travel: `sylvan.transport`.
"""
