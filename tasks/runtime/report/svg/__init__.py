"""Charts as inline SVG, without scripts."""
