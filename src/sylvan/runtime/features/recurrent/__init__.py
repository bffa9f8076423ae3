"""Recurrent states of layers without attention, for requests and cached prefixes.

`control.RecurrentStates` plans copies and saves of states; `worker` makes them. Slots of states
belong to `cache.states`.
"""
