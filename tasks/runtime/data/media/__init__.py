"""Images and audio of rows."""
