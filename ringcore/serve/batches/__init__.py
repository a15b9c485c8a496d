"""OpenAI's files and batches: uploads in a folder, and jobs of `ringcore.batch` whose store is their journal."""
