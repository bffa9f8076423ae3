"""Runs matchers of libraries without resource limits in processes that can be killed.

The engine starts one fork server, which loads the library. It forks a process per grammar, which
compiles it; that one forks a matcher server, which holds the matchers of the grammar's outputs.
If a matcher server dies (CPU time, memory, crash), only the output of the current step fails: the
next one replays the tokens of the others.
"""
