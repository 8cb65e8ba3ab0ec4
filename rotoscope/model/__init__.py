"""The only room that knows transformers' internals: loading, anatomy, the tap, rotary tables, boundaries."""
