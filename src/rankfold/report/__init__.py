"""What is told about a run: plan, record, model card."""
