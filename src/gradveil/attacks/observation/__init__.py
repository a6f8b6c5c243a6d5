"""What an adversary sees: the gradients of one step or several, simulated, recorded or read from files."""
