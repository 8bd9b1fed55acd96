"""The check of kernels at their first use; it knows neither ops nor rules.

question: questions and answers; judge: checks results; store: answers in a file; asking: puts them
together.
"""
