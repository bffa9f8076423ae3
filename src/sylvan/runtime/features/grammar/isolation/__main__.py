"""The fork server of isolated grammars; its standard input is the engine's socket.

python -m sylvan.runtime.features.grammar.isolation
"""

from __future__ import annotations

import os
import signal
import socket

from sylvan.runtime.features.grammar.isolation.server import serve

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=os.dup(0)) as control:
        os.close(0)
        os.open(os.devnull, os.O_RDONLY)
        serve(control)
