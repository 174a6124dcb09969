"""Which tile is fastest for an op and shape on this GPU: `candidates` of a stage, `search` among them."""
