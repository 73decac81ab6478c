"""Long jobs in their own processes: quantisation, fine-tuning, and export of the result.

A request that does not fit raises `InvalidRequestError`, and a model that cannot be found or read
`LoadError`.
"""
