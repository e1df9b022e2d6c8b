"""Data: table layouts, chat rendering and loss masks, dataset adapters, mixing, packing and the synthetic worlds."""
