"""From files, URLs and data sets of the Hub to rows."""
