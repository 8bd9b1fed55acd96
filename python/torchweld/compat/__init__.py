"""Other packages' functions by their own names and arguments, computed by torchweld.

`torchweld.compat.trl`, `.verl`, `.liger` and `.varlen` import nothing of those packages, but for
`trl.patch`, which changes TRL's trainers. An argument that torchweld does not serve raises an error
that names it.
"""
