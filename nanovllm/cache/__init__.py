"""State that layers keep of a sequence: kinds, pools, block tables and the prefix index. No torch."""
