"""What has nothing to do with models: files, locks, progress, time."""
