"""What the engines tell of themselves: one module per dialect, and how to recognise it."""
