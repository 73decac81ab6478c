"""Long jobs in their own processes: quantisation, fine-tuning, and export of the result."""
