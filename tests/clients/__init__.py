"""Official clients that nobody here wrote, against the real engine."""
