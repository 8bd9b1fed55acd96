"""The one engine that chooses among callables; it knows neither ops nor rules.

question: questions and answers; judge: checks results; clock: times calls; store: answers in a
file; apart: isolates trials; asking: puts them together.
"""
