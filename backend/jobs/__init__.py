"""Long jobs in processes of their own: quantisation, fine-tuning, export of what was trained."""
