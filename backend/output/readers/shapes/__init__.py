"""The patterns that readers look for, made from the dialects of the formats."""
