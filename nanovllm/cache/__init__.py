"""What layers keep of a sequence: kinds, pools, block tables and the prefix index of each group. No torch."""
