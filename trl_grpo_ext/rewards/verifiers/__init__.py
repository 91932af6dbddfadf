"""The verifiers shipped with the package, one file (or sub-package) each."""
