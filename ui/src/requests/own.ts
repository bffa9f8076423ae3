// Requests of this page, newest first: known even if the server lists no requests.
import type { Stats } from "../chat/model";
import { Store } from "../store";

export interface OwnRequest extends Stats {
  at: number;
  finish: string;
}

const MOST = 100;

export const own = new Store<OwnRequest[]>([]);

export function record(stats: Stats, finish: string): void {
  const at = Date.now() / 1000 - stats.totalS;
  own.set([{ ...stats, finish, at }, ...own.value].slice(0, MOST));
}
