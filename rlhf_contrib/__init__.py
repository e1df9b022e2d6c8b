"""Topics that the lifecycle can do without, one folder each. The core never imports them; docs/contrib.md lists them."""
