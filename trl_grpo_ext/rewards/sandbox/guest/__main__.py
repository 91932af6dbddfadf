"""Started as ``python -s -S …/guest/__main__.py CONFIG``: finds its own package and nothing else of ours."""

import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _here]
sys.path.insert(0, os.path.dirname(_here))

from guest import server  # noqa: E402

sys.dont_write_bytecode = True
sys.path.pop(0)
server.main()
