"""The passes of a compile, one a file; ``passes/README.md`` lists them in pipeline order."""
