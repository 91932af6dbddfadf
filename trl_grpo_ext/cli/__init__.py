"""The command line. Modules here stay light; what needs torch is imported when a command has checked its inputs."""

import time

# The first thing that runs, so that a run's wall time holds the seconds spent on imports.
STARTED = time.monotonic()
