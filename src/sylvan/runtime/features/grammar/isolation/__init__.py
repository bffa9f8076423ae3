"""Runs matchers of libraries that bound nothing in processes that can be killed.

The engine starts one zygote, which loads the library. It forks a process for each grammar, which
compiles it; that one forks a server, which holds the matchers of all outputs of the grammar. A
server that dies (processor time, memory, a crash) costs the output it was at: the next server
replays the tokens of the others.
"""
