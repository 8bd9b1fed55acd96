"""The commands: `torchweld doctor`, `bench`, `demo`, `tune` and `link`."""
