"""How long a clip of Wan2.2-A14B takes; see evaluation/README.md."""
