# The one place that names versions. Sourced by common.sh.
NODE=node@22.23.3 # fetched only where the machine's own is older than 22
CODEX=@openai/codex@0.171.0
CLAUDE=@anthropic-ai/claude-code@2.1.332
OPENCODE=opencode-ai@1.18.33
PI=@earendil-works/pi-coding-agent@1.6.0
NODE_SDKS="openai@7.59.0 @anthropic-ai/sdk@1.14.0 ai@7.0.173 @ai-sdk/openai-compatible@3.0.92"
PYTHON_SDKS="openai==3.57.0 anthropic==2.14.0"
LANGCHAIN="langchain-openai==1.7.4 langchain-anthropic==1.7.10"
LLM=llm==0.36
AIDER=aider-chat==0.86.2
