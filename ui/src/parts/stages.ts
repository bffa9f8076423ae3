// Stages of a request, as `/metrics`, `/trace` and `/requests` name them.

/** Short name, description and colour. */
export const STAGES: Record<string, [string, string, number]> = {
  tokenize: ["tokenize", "Prompt rendered and tokenised", 6],
  api_server_dispatch: ["dispatch", "Sent to the scheduler", 5],
  prefill_waiting: ["wait", "Waits for its turn", 3],
  prefill_forward: ["prefill", "Prompt, up to the first token", 2],
  decode_forward: ["decode", "The other tokens", 1],
  detokenize: ["detokenize", "Text made", 7],
  network: ["network", "Sent to the client", 4],
};
