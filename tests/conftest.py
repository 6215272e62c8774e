"""What holds for every test."""

from hypothesis import settings

# Machines are noisy: how long an example takes is a benchmark's business.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
