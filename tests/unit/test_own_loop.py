"""The loop of docs/your-script.md: stopped or killed anywhere, it resumes to the same weights."""
