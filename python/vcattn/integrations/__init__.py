"""Adapters to the hosts that run video diffusion transformers; docs/integrations.md says which versions were tested."""
