"""The inside of the sandbox: standard library only, run by an interpreter that never imports this package's rest.

``server`` is the warm process that forks one child per program; ``candidate`` and ``judge`` are what such a child runs;
the other modules take rights away. They are imported as ``guest.*`` there and under the full name by the tests.
"""
