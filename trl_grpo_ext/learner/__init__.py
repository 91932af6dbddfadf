"""The exact, fast forward pass: packing of groups, attention over them, scoring of completions."""
