"""What recipes do to a clip: our small video diffusion transformer rendered under each; see evaluation/README.md."""
