"""Rewards: trained models and functions, their composition and shaping."""
