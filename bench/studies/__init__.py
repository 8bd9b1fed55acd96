"""Programs that answered one question once: `python -m torchweld.bench.studies.NAME`.

They are only in a checkout, not in the wheel; docs/notebook has the answers.
"""
