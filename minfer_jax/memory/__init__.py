"""What a model remembers of a sequence, and where. `kv` is the host side, `kv_view` the graph's.

The memory owns the regions, their sizes and the cursor; models never index a region, and the
context never looks inside one.
"""
