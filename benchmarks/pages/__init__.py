"""Pages of docs/results: functions of a record that return lines of Markdown."""
