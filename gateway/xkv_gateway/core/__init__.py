"""The pure engine: types, allocator, index, leases, recency, state machine."""
