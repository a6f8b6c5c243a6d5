"""What is refused, and why: do the examples of a batch stay independent, and is the loss a mean or sum over them?"""
