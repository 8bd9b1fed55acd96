"""How times are taken: contenders, clocks, the machine, and what a GPU's evidence is."""
