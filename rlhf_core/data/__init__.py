"""Prepare data: table layouts, chat rendering, loss masks, dataset adapters, mixing, packing and synthetic worlds."""
