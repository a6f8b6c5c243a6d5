"""How close a reconstruction comes: scores of images and tables, and what a guess without gradients gets."""
