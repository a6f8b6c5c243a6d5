"""What is released: strategies, schedules, sampling, clip bounds, noise, and the record of each release."""
